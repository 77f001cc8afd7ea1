"""The self-check: what a model computes right when it is chunked, restored or rewound."""
