"""Programs that measure what the README and the design claim. Figures are in RESULTS.md."""
