"""The engine alone, in this process: decode, prefill and quality with different weights, in turns in one run."""
