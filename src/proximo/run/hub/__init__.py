"""The way of trained models to the Hugging Face Hub."""
