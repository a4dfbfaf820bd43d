"""The experiment on birth places: people and questions about them, a model that reads, is fine-tuned, and answers."""
