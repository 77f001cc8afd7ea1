"""Chats as token ids: the template, message boundaries, and what a template may cost."""
