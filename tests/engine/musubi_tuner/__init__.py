"""Files of musubi-tuner, which is on no package index, and how they were made."""
