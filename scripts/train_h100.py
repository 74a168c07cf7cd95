"""Train the 350M model with the defaults of the H100 guide.

python scripts/train_h100.py [--batch_size 16 …] [key=value …]
"""

from guide_flags import Defaults, run

if __name__ == "__main__":
    # The guide: batch size 8, "16 instead of 8 when not using FP8". Both give 128 sequences per update.
    run("Train the 350M model with the settings of the H100 guide.", Defaults(8, 16, 4e-4, 1.5, without_fp8=(16, 8)))
