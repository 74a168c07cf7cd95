"""Make this process look like one on Windows: the modules that only Unix has cannot be imported."""

import sys

UNIX_ONLY = ("fcntl", "resource", "termios", "pwd", "grp", "posix_ipc", "pty")

for name in UNIX_ONLY:
    sys.modules[name] = None  # an import of it raises ImportError
sys.platform = "win32"
