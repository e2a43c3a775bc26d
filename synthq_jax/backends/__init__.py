"""Other trainers that make this project's private steps."""
