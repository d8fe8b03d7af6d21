"""The certificate: what it means and assumes is said in docs/certificates.md.

In the order in which it happens: contributions.py (what each sentence would have added to the
update, and how much rounding may leave), counting.py (how often each sentence was there),
word_sieve.py and neighbourhood.py (whether a guess next to this one fits as well), certify.py (all
of it).
"""

from gradleak.attacks.certificate.certify import (
    CERTIFYING,
    Certificate,
    certify,
    certify_all,
    fits,
    with_certificates,
)

__all__ = ["CERTIFYING", "Certificate", "certify", "certify_all", "fits", "with_certificates"]
