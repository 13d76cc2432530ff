"""Tasks that models are trained on and measured by."""
