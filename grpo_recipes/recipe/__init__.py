"""What a recipe asks for, checked before a model is loaded."""
