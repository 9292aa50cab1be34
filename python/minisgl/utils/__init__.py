"""What several rooms need and none of them owns."""
