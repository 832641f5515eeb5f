"""Model architectures behind one protocol, and how their checkpoints are loaded."""
