"""The command `bough`: what a person types, and what they see. Nothing below this package prints."""
