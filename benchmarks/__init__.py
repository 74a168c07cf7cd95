"""Comparisons of redline with other programs, and the studies behind the figures in docs/.

`python -m benchmarks NAME …` (or `make bench ARGS="NAME …"`) runs a comparison; `peers/` holds the other programs'
training loops, `studies/` one-off measurements, `results/` the committed results. Not part of the installed package.
"""
