"""Components that several families share."""
