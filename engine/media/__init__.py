"""Sound and images as files and as arrays. Imports interface."""
