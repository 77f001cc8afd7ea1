"""What the engines share: lanes, groups and pages without any tensor library."""
