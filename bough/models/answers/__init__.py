"""Reading an answer: what is thinking, what is a tool call, what is the text."""
