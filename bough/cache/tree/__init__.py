"""The prefix trie: which token prefixes we hold state for, with their pages and restore points. Pure: no disk, no clock."""
