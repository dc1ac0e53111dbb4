"""Training: one loop for every task, the run folder, checkpoints, and runs opened for use."""
