"""Pages of the documentation made from kept results."""
