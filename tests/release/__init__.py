"""An app in two releases: ``TEST_RELEASE`` says which one a process is."""
