"""Sound and pictures as files and as arrays. Imports interface."""
