"""Networks for images: their weights, and what an image goes through before them."""
