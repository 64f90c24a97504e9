"""Engine of generator stages, whole or in windows. Imports models and the rooms below them."""
