"""timm's architectures: a small one of every family, at the smallest input that it takes."""

from __future__ import annotations

AT_64 = """
    crossvit_tiny_240 cpubone_nano davit_tiny efficientvim_m1_dist fasternet_t0 focalnet_tiny_lrf hieradet_small
    iformer_s lowformer_b0 nextvit_small pvt_v2_b0 rdnet_tiny repghostnet_050 bat_resnext26ts eca_resnext26ts
    gcresnext26ts gernet_s mobileone_s0 repvgg_b0 seresnext26ts cs3darknet_s darknet17 sedarknet21 densenetblur121d
    dpn68 fbnetc_100 mnasnet_050 mobilenet_edgetpu_v2_xs mobilenetv2_050 semnasnet_050 spnasnet_100 tinynet_a
    tf_efficientnet_b0 ghostnetv3_050 hardcorenas_a hgnet_tiny hgnetv2_b0 inception_next_atto lcnet_050 lcnetv2_small
    fbnetv3_b tf_mobilenetv3_small_minimal_100 poolformerv2_s12 eca_nfnet_l0 nf_regnet_b0 regnetv_040 regnetz_005
    repvit_m0_9 resnest26d ecaresnetlight ecaresnext26t_32x4d resnetaa50 resnetblur18 resnetrs50 resnetv2_18
    rexnet_100 selecsls42 shvit_s1 skresnext50_32x4d starnet_s050 tresnet_m ese_vovnet19b_slim legacy_xception
    test_byobnet test_convnext test_efficientnet test_mambaout test_nfnet test_resnet gc_efficientnetv2_rw_t
    efficientnetv2_rw_t mobilenetv4_conv_small_050 mixnet_s swiftformer_xs
""".split()  # noqa: SIM905 - a list of words reads better
"""At 64×64."""

SIZED = """
    cait_xxs24_224 coat_tiny convit_tiny convmixer_1024_20_ks9_p14 csatv2 deit_tiny_patch16_224 efficientformerv2_s0
    efficientvit_m0 eva02_tiny_patch14_224 gcvit_tiny hiera_tiny_224 levit_128 coatnext_nano_rw_224
    maxxvit_rmlp_nano_rw_256 caformer_s18 convformer_s18 gmixer_12_224 gmlp_s16_224 resmlp_12_224 mobilevitv2_050
    mvitv2_tiny nest_tiny pit_xs_224
""".split()  # noqa: SIM905
"""Built for 64×64 with `img_size`."""
