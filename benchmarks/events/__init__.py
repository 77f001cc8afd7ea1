"""What readers of `/api/events` cost those who chat, and what a large tree costs its readers."""
