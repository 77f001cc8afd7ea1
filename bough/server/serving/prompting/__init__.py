"""From an ask to a prompt: messages, tools and earlier answers become the token ids that a model is given."""
