"""What the engines share: it knows lanes, groups and pages, and no tensor library."""
