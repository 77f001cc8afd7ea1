"""Reading a model's answer: what of its text is thinking, what is a tool call, and what is the answer itself."""
