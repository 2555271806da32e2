"""The capture worker: conversations x target -> a store of features."""
