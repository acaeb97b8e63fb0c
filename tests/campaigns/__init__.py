"""Long series of training runs drawn at random, and programs that hunt for bits that differ."""
