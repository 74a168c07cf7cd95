"""Make this process look like one on macOS: no /proc, no glibc, and none of the functions that only Linux has."""

import builtins
import ctypes
import io
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import types

LINUX_ONLY = {
    os: (
        "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate fdatasync memfd_create copy_file_range "
        "splice eventfd pidfd_open getrandom getxattr setxattr listxattr removexattr pipe2 O_DIRECT O_TMPFILE "
        "O_PATH O_NOATIME getresuid setresuid unshare setns"
    ),
    resource: "prlimit RLIMIT_RTPRIO RLIMIT_SIGPENDING RLIMIT_MSGQUEUE",
    select: "epoll",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT sigtimedwait sigwaitinfo",
    socket: "AF_NETLINK AF_PACKET SO_BINDTODEVICE SO_PEERCRED",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
}
ABSENT = ("/proc", "/sys", "/dev/shm", "/etc/os-release")


def refuse(function):
    def wrapped(path=".", *rest, **named):
        if isinstance(path, str | bytes | os.PathLike):
            text = os.fsdecode(path)
            if any(text == place or text.startswith(f"{place}/") for place in ABSENT):
                raise FileNotFoundError(2, "No such file or directory", text)
        return function(path, *rest, **named)

    return wrapped


class CDLL(ctypes.CDLL):
    def __init__(self, name=None, *rest, **named):
        if name == "libc.so.6":
            raise OSError("dlopen(libc.so.6): no such file")
        super().__init__(name, *rest, **named)

    def __getattr__(self, name):
        if self._name is None and name in ("tgkill", "mallopt", "prctl", "sched_getcpu"):
            raise AttributeError(name)
        return super().__getattr__(name)


sysconfig.get_config_vars()  # read the file of the real platform
sys.platform = "darwin"
for module, names in LINUX_ONLY.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
    setattr(os, name, refuse(getattr(os, name)))
builtins.open = io.open = refuse(io.open)
ctypes.CDLL = CDLL

_scproxy = types.ModuleType("_scproxy")  # urllib asks macOS for its proxies through this module
_scproxy._get_proxy_settings = _scproxy._get_proxies = dict
sys.modules["_scproxy"] = _scproxy
