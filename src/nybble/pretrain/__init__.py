"""Pretraining: settings, optimiser, schedule and the loop."""
