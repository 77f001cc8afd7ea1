"""Chats as token ids: the template, the processes that render it, and message boundaries."""
