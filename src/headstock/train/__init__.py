"""Training: settings, the loop, checkpoints and the run folder; pretraining and fine-tuning."""
