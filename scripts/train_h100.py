"""The 350M model with the H100 guide's defaults: python scripts/train_h100.py [--batch_size 16 …] [key=value …]"""

from guide_flags import Defaults, run

if __name__ == "__main__":
    # the guide's batch is 8, and "16 instead of 8 when not using FP8": the same 128 sequences for each update
    run("Train the 350M model as the H100 guide does.", Defaults(8, 16, 4e-4, 1.5, without_fp8=(16, 8)))
