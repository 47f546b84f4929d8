"""What each weight policy costs a model: accuracy against synchronous training."""
