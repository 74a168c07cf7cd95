"""The 350M model with the H100 guide's defaults: python scripts/train_h100.py [--batch_size 16 …] [key=value …]"""

from guide_flags import Defaults, run

if __name__ == "__main__":
    run("Train the 350M model as the H100 guide does.", Defaults(8, 16, 4e-4, 1.5))
