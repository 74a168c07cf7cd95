"""Run `redline doctor` from a checkout.

python scripts/diagnose_gpu.py [--json] [--probe]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

try:
    from redline.cli.main import main
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed. Run `make setup`, then .venv/bin/python scripts/diagnose_gpu.py")

if __name__ == "__main__":
    sys.argv[1:1] = ["doctor"]
    main()
