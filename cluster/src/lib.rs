//! Who is there: worker records and the ways to discover them.
