"""What made the weights that ship; nothing else imports it."""
