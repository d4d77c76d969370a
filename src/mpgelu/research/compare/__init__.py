"""Our estimator beside other methods on the published splits: ``mpgelu compare``."""
