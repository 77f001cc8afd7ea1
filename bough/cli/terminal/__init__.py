"""Reading from and writing to a terminal or a pipe: text, columns, progress and streamed answers."""
