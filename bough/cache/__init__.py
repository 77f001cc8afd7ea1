"""The idea: one tree that holds the state of every distinct prefix once. Standard library only."""
