"""The page: an app of tabs on loopback, each with one file here and one in web/."""
