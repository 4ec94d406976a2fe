"""Types that the packages of the API share: requests, results, sampling options, context."""
