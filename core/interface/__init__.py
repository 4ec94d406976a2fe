"""Types that the packages exchange: requests, steps, and the protocols of drafting."""
