"""The common parts of the engines: lanes, groups and pages without any tensor library."""
