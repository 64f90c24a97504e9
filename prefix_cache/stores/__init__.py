"""Storage behind block ids: pages, mirrored and encoder outputs. Imports blocks, specs."""
