"""What each type of layer keeps, and what all can serve together. Imports blocks, specs."""
