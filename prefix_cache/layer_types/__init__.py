"""Cache managers per layer type, and the coordinator of all of them. Imports blocks, specs."""
