"""The prefix trie: which token prefixes we hold state for, and what lies on them. Pure: no disk, no clock."""
