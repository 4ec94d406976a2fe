"""Types that the packages exchange: requests, steps, and protocols of drafting and running."""
